-- The schema, read from the server's catalogue, without partitions and the record of migrations.

-- name: spell_names_out
-- Names on the search path would be printed without their schema.
SELECT set_config('search_path', 'pg_catalog', true)

-- name: enums
SELECT format('CREATE TYPE lineshaft.%%I AS ENUM (%%s);', type.typname, string_agg(quote_literal(label.enumlabel), ', ' ORDER BY label.enumsortorder))
FROM pg_catalog.pg_type AS type
JOIN pg_catalog.pg_enum AS label ON label.enumtypid = type.oid
WHERE type.typnamespace = 'lineshaft'::regnamespace
GROUP BY type.typname
ORDER BY type.typname

-- name: sequences
-- Those of identity columns belong to their tables.
SELECT format('CREATE SEQUENCE lineshaft.%%I AS %%s;', sequence.relname, format_type(facts.seqtypid, NULL))
FROM pg_catalog.pg_class AS sequence
JOIN pg_catalog.pg_sequence AS facts ON facts.seqrelid = sequence.oid
WHERE sequence.relnamespace = 'lineshaft'::regnamespace
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend WHERE objid = sequence.oid AND deptype = 'i')
ORDER BY sequence.relname

-- name: tables
SELECT
    class.relname,
    coalesce(' PARTITION BY ' || pg_get_partkeydef(class.oid), '')
        || coalesce(' WITH (' || (SELECT string_agg(option, ', ' ORDER BY option) FROM unnest(class.reloptions) AS option) || ')', ''),
    obj_description(class.oid)
FROM pg_catalog.pg_class AS class
WHERE class.relnamespace = 'lineshaft'::regnamespace
  AND class.relkind IN ('r', 'p')
  AND NOT class.relispartition
  AND class.relname <> 'migration'
ORDER BY class.relname

-- name: columns
SELECT
    class.relname,
    quote_ident(attribute.attname) || ' ' || format_type(attribute.atttypid, attribute.atttypmod)
        || CASE WHEN attribute.attcollation <> type.typcollation THEN ' COLLATE ' || quote_ident(collation_.collname) ELSE '' END
        || CASE WHEN attribute.attidentity = 'a' THEN ' GENERATED ALWAYS AS IDENTITY' ELSE '' END
        || CASE WHEN attribute.attnotnull AND attribute.attidentity = '' THEN ' NOT NULL' ELSE '' END
        || coalesce(' DEFAULT ' || pg_get_expr(fallback.adbin, fallback.adrelid), '')
FROM pg_catalog.pg_class AS class
JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = class.oid AND attribute.attnum > 0 AND NOT attribute.attisdropped
JOIN pg_catalog.pg_type AS type ON type.oid = attribute.atttypid
LEFT JOIN pg_catalog.pg_collation AS collation_ ON collation_.oid = attribute.attcollation
LEFT JOIN pg_catalog.pg_attrdef AS fallback ON fallback.adrelid = class.oid AND fallback.adnum = attribute.attnum
WHERE class.relnamespace = 'lineshaft'::regnamespace
  AND class.relkind IN ('r', 'p')
  AND NOT class.relispartition
  AND class.relname <> 'migration'
ORDER BY class.relname, attribute.attnum

-- name: constraints
-- PostgreSQL 18 lists NOT NULL here too; the columns have it already.
SELECT class.relname, format('CONSTRAINT %%I %%s', constraint_.conname, pg_get_constraintdef(constraint_.oid))
FROM pg_catalog.pg_constraint AS constraint_
JOIN pg_catalog.pg_class AS class ON class.oid = constraint_.conrelid
WHERE class.relnamespace = 'lineshaft'::regnamespace
  AND NOT class.relispartition
  AND class.relname <> 'migration'
  AND constraint_.contype <> 'n'
ORDER BY class.relname, constraint_.contype, constraint_.conname

-- name: indexes
-- Without indexes of constraints. A partitioned index is printed with ONLY.
SELECT replace(pg_get_indexdef(index.indexrelid), ' ON ONLY ', ' ON ') || ';' || CASE WHEN index.indisvalid THEN '' ELSE ' -- INVALID' END
FROM pg_catalog.pg_index AS index
JOIN pg_catalog.pg_class AS class ON class.oid = index.indrelid
JOIN pg_catalog.pg_class AS name ON name.oid = index.indexrelid
WHERE class.relnamespace = 'lineshaft'::regnamespace
  AND NOT class.relispartition
  AND class.relname <> 'migration'
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint WHERE conindid = index.indexrelid AND contype IN ('p', 'u', 'x'))
ORDER BY class.relname, name.relname

-- name: views
-- The text of a view differs between versions of PostgreSQL; its columns and types don't.
SELECT
    class.relname,
    string_agg(quote_ident(attribute.attname) || ' ' || format_type(attribute.atttypid, attribute.atttypmod), ', ' ORDER BY attribute.attnum),
    obj_description(class.oid)
FROM pg_catalog.pg_class AS class
JOIN pg_catalog.pg_attribute AS attribute ON attribute.attrelid = class.oid AND attribute.attnum > 0 AND NOT attribute.attisdropped
WHERE class.relnamespace = 'lineshaft'::regnamespace AND class.relkind = 'v'
GROUP BY class.oid, class.relname
ORDER BY class.relname

-- name: programs
-- Lineshaft has no triggers; functions and policies are listed so that a manual change shows.
SELECT 'TRIGGER ' || trigger_.tgname || ' ON ' || class.relname
FROM pg_catalog.pg_trigger AS trigger_
JOIN pg_catalog.pg_class AS class ON class.oid = trigger_.tgrelid
WHERE class.relnamespace = 'lineshaft'::regnamespace AND NOT trigger_.tgisinternal
UNION ALL
SELECT 'POLICY ' || policy.polname || ' ON ' || policy.polrelid::regclass::text || ' USING ' || pg_get_expr(policy.polqual, policy.polrelid)
FROM pg_catalog.pg_policy AS policy
JOIN pg_catalog.pg_class AS class ON class.oid = policy.polrelid
WHERE class.relnamespace = 'lineshaft'::regnamespace
UNION ALL
SELECT 'FUNCTION ' || oid::regprocedure::text FROM pg_catalog.pg_proc WHERE pronamespace = 'lineshaft'::regnamespace
ORDER BY 1
