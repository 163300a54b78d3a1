"""Models as other programs store them: folders of Hugging Face, GGUF files."""
