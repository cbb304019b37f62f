"""Administration of a server: checks, users and their rights, backups, the doctor."""
