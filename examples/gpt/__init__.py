"""What `train_gpt.py` is made of: the model, the text, the training loop and the report."""
