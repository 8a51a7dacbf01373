-- Reserved: this number belongs to another migration.
SELECT 1;
