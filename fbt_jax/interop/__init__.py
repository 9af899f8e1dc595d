"""Other projects' formats: a run as a folder that Hugging Face `transformers` loads."""
