"""The live state of a fault's survivors: recorded at step boundaries, handed to the next world.

``boundary_recorder`` remembers where the state of a boundary is. ``survivor_state`` keeps it until it is saved or
superseded. ``survivor_choice`` chooses the newest step that the survivors hold completely.
"""
