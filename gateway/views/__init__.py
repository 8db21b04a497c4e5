"""What the gateway answers itself: lists, states, settings, logs and orders."""
