"""Decoding with latent feedback: standard, soft and fused (method.md section 5)."""
