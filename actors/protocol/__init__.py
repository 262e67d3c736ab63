"""Networks of actors and the protocol by which they fire: states, simulation, the proof that a network ends."""
