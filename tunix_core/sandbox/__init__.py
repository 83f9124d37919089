"""Running code that a language model wrote: processes in bubblewrap, and an interpreter for expressions."""
