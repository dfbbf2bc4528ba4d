"""Public functions, one module a family. Each: contract, checks, then the registered op."""
