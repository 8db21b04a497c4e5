"""What all processes share: words, keys, Redis scripts, settings, logs."""
