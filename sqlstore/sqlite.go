package sqlstore

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

type sqlite struct{}

func (sqlite) statements(table dialect.Table) *dialect.Statements { return dialect.SQLite(table) }

func (sqlite) classify(err error) dialect.Class { return dialect.ClassifySQLite(err) }

// claimStatement leaves the wait to the connection's busy_timeout: what is waited for is the file, not the key.
func (sqlite) claimStatement(_ context.Context, s *Store, claim inbox.Claim) (claimStatement, error) {
	fingerprint, payload, metadata := claimArgs(claim)
	return claimStatement{
		query: s.statements.Claim,
		args:  []any{claim.Key.Consumer, claim.Key.MessageID, fingerprint, payload, metadata},
	}, nil
}

// mustSeal is always true: an interrupted statement undoes the transaction, and if a handler hides it, what follows is in
// none.
func (sqlite) mustSeal(*Tx) (bool, error) { return true, nil }

func (sqlite) createSchema(ctx context.Context, s *Store, statements []string) error {
	return s.execAll(ctx, statements)
}

func (s sqlite) tableFaults(ctx context.Context, store *Store) ([]string, error) {
	schema, table := s.schema(store), store.table.Name
	columns, err := queryColumns(ctx, store.db, `
SELECT name, type, "notnull" FROM pragma_table_info(?1, ?2)`, table, schema)
	if err != nil {
		return nil, err
	}
	if len(columns) == 0 {
		return []string{"the table is missing"}, nil
	}
	faults := columns.faults([]wantColumn{
		{"consumer", "TEXT", true},
		{"message_id", "TEXT", true},
		{"received_at", "TEXT", true},
		{"processed_at", "TEXT", false},
		{"fingerprint", "BLOB", false},
		{"payload", "BLOB", false},
		{"metadata", "BLOB", false},
		{"outputs", "BLOB", false},
		{"outputs_published_at", "TEXT", false},
	})

	indexes, err := queryStrings(ctx, store.db, `
SELECT CASE l.origin WHEN 'pk' THEN 'primary key' ELSE CASE l."unique" WHEN 1 THEN 'unique index' ELSE 'index' END END
	|| ' (' || (
		SELECT group_concat(column, ', ')
		FROM (
			SELECT x.name || CASE x.coll WHEN 'BINARY' THEN '' ELSE ' COLLATE ' || x.coll END AS column
			FROM pragma_index_xinfo(l.name, ?2) AS x
			WHERE x.key = 1
			ORDER BY x.seqno
		)
	) || ')'
	|| CASE l.partial WHEN 1 THEN ' ' || (SELECT substr(m.sql, instr(upper(m.sql), 'WHERE'))
		FROM `+quoteSQLite(schema)+`.sqlite_master AS m WHERE m.name = l.name) ELSE '' END
FROM pragma_index_list(?1, ?2) AS l`, table, schema)
	if err != nil {
		return nil, err
	}
	return append(faults, missingIndexes(indexes, "primary key (consumer, message_id)",
		"index (received_at) WHERE outputs IS NULL", "index (received_at) WHERE outputs IS NOT NULL")...), nil
}

func (sqlite) schema(s *Store) string {
	if s.table.Schema == "" {
		return "main"
	}
	return s.table.Schema
}

// quoteSQLite quotes a validated name.
func quoteSQLite(name string) string { return `"` + name + `"` }

// settingFaults looks at one connection. Databases in memory have no journal to choose, and no other process.
func (s sqlite) settingFaults(ctx context.Context, store *Store) ([]string, error) {
	conn, err := store.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	schema := s.schema(store)
	var file sql.NullString
	err = conn.QueryRowContext(ctx, "SELECT file FROM pragma_database_list WHERE name = ?1", schema).Scan(&file)
	if err != nil || file.String == "" {
		return nil, err
	}
	var (
		journal string
		timeout int
		faults  []string
	)
	if err := conn.QueryRowContext(ctx, "PRAGMA "+quoteSQLite(schema)+".journal_mode").Scan(&journal); err != nil {
		return nil, err
	}
	if journal != "wal" {
		faults = append(faults, fmt.Sprintf("journal_mode is %q, want wal: readers and writers exclude each other", journal))
	}
	if err := conn.QueryRowContext(ctx, "PRAGMA busy_timeout").Scan(&timeout); err != nil {
		return nil, err
	}
	if timeout == 0 {
		faults = append(faults, "busy_timeout is 0: a second writer fails at once instead of waiting")
	}
	return faults, nil
}

func (sqlite) deleteExpired(ctx context.Context, s *Store, age int64, limit int) (int, error) {
	result, err := s.db.ExecContext(ctx, s.statements.DeleteExpired, age, limit)
	if err != nil {
		return 0, err
	}
	rows, err := result.RowsAffected()
	return int(rows), err
}
