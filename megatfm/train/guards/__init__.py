"""What keeps a run from going wrong: checks before the first step and between steps, and what is done then."""
