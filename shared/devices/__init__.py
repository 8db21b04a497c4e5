"""What memory this machine has and how much of it is free: NVIDIA GPUs and the host itself."""
