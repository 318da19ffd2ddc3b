"""The engine `parallel.engine = "deepspeed"`: DeepSpeed's ZeRO under megatfm's training loop and checkpoints."""
