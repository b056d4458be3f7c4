"""Live state of the survivors of a fault: recorded at step boundaries, loaded by the next world.

``boundary_recorder`` records references to the state of a boundary. ``survivor_state`` retains it until it is saved or
superseded. ``survivor_choice`` chooses the newest step that the survivors hold completely.
"""
