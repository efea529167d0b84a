"""Does training by votes reach what full precision reaches? Data, models and runs of the study."""
