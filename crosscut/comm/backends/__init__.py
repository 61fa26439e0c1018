"""How ranks talk: one module a back end."""
