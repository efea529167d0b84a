"""The model: a GPT of 7.3 million parameters, small batches, so that the network counts."""

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 4, 384, 6, 64, 256
BATCH = 2  # windows of each worker
MODEL = {
    "layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT, "tied": False,
}  # fmt: skip
