"""The HTTP front end: OpenAI's API over the engine. Imports stay lazy: `arguments` needs no web framework."""
