"""What a server needs around the engine: its thread, the OpenAI and Ollama protocols, guards, metrics, live page."""
