"""What other tools read and run: lm-evaluation-harness."""
