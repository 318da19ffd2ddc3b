"""The engine `parallel.engine = "deepspeed"`: DeepSpeed's ZeRO under our loop, layouts and checkpoints."""
