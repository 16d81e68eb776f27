"""What each command takes, read without torch; what it does is in `warploom.commands`."""
