"""One module a suite; each yields its cases. Peers are plain functions beside them."""
