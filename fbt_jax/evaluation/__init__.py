"""Evaluation: losses and update norms by pass, from the same `multi_pass` that training uses."""
