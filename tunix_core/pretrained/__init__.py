"""Models from outside: Hugging Face folders and GGUF files in, Hugging Face folders out, tokenizers."""
