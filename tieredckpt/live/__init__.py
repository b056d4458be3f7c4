"""The live state of a fault's survivors: recorded at step boundaries, handed to the next world.

``noting`` remembers where the state of a boundary is; ``keeping`` has it until it is given or not needed; ``choosing``
says which step the survivors have whole between them; ``giving`` saves that step in the new world.
"""
