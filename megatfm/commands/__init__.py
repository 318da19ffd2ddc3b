"""The commands: `add_NAME_arguments` declares what a command takes, `NAME_command` does its work."""
