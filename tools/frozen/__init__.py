"""What the package does, as JSON that two trees can be compared by: see tools/freeze.py."""
