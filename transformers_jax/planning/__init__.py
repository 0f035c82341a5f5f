"""Training runs on paper: what they need, before there are devices to run them on."""
