"""Where other people's clusters meet this system: each platform is a package of its own, and none is imported by the rest."""
