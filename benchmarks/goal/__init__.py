"""What `time_to_loss.py` is made of: contenders, their curves, their milliseconds, and the sums."""
