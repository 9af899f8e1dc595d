"""Trained models in other projects' hands: Hugging Face folders, lm-evaluation-harness."""
