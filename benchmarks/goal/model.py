"""The model of all contenders: the GPT of the demo on windows of 32 bytes, 430,720 parameters."""

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 2, 128, 4, 32, 256
HEAD = WIDTH // HEADS  # the width of a head, of all sizes of model
MODEL = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT}
STEPS = 256  # of each worker, in a run
LONGER = 384  # of those who do not get there in that
# Bytes that a worker sees in a step: one window, 8 and 64 times as many.
TOKENS = CONTEXT, 8 * CONTEXT, 64 * CONTEXT
WORKERS = 4, 8, 32
