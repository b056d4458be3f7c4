"""What survivors of a fault still have in their tensors: noted at every step boundary, and given to the next world.

``noting`` remembers where the state of a boundary is; ``keeping`` has it until it is given or not needed; ``choosing``
says which step the survivors have whole between them; ``giving`` saves that step in the new world.
"""
