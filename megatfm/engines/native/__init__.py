"""The native engine: ZeRO stages 0 to 3 and our own pipeline runner."""
