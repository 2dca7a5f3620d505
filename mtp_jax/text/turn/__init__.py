"""An assistant's turn in parts: reasoning, content, tool calls; `formats` has the dialects."""
