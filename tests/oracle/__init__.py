"""Every algorithm in plain arrays, workers as a leading axis: the oracle of the tests and a simulator."""
