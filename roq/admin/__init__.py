"""What whoever runs the server needs: checks of it, users and their rights, backups, the doctor."""
