"""What must hold of every run. Each rule gives what breaks it, in words."""
