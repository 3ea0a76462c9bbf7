"""The control API: its wire types, the views that it returns, and the client that calls it."""
