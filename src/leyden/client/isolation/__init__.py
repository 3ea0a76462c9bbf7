"""Keeps agents away from the files of the run and from each other: `workers.isolation`.

`user` runs every host and every command that runs at a time under its own user id; it needs root. `sandbox` shows them
only the system, the interpreter, the agent's folder and a scratch folder, and no network but the gateway and what the
configuration allows; it needs bubblewrap. Worker and command host are never isolated: they run no agent code.
"""
