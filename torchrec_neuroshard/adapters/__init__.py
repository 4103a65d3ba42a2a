"""The border to TorchRec: the only room, with planner.py and estimator.py, that imports its planner."""
