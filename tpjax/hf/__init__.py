"""Models as Hugging Face folders and GGUF files have them: read and written shard by shard."""
