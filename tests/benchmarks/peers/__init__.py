"""Contestants: the same update by our learner, by PyTorch and by google-tunix, each in a process of its own."""
