"""Parts of `train_gpt.py`: the model, the text, the training loop and the report."""
