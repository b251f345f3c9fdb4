package sqlstore

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"hash/fnv"
	"reflect"
	"time"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

type postgreSQL struct{}

func (postgreSQL) statements(table dialect.Table) *dialect.Statements {
	return dialect.PostgreSQL(table)
}

func (postgreSQL) classify(err error) dialect.Class { return dialect.ClassifyPostgreSQL(err) }

func (postgreSQL) claimStatement(_ context.Context, s *Store, claim inbox.Claim) (claimStatement, error) {
	fingerprint, payload, metadata := claimArgs(claim)
	return claimStatement{query: s.statements.Claim, args: []any{
		claim.Key.Consumer, claim.Key.MessageID, dialect.LockTimeoutParam(claim.LockTimeout), fingerprint, payload, metadata,
	}}, nil
}

// mustSeal saves the round trip where the driver knows the state of the session, and the transaction is too young for its
// processed_at, written with the claim, to matter. PostgreSQL loses no transaction silently, but a handler can end it with
// a raw ROLLBACK, and COMMIT without a transaction is no error.
func (postgreSQL) mustSeal(t *Tx) (bool, error) {
	if time.Since(t.began) > dialect.SealAfter {
		return true, nil
	}
	must := true
	err := t.onConn(func(conn *sql.Conn) error {
		return conn.Raw(func(driverConn any) error {
			status, known := transactionStatus(unwrap(driverConn))
			must = !known
			switch {
			case known && status == 'I':
				return dialect.ErrClaimLost
			case known && status == 'E':
				return dialect.ErrAborted
			}
			return nil
		})
	})
	return must, err
}

// transactionStatus returns the session's state as the server reported it last, if the driver is pgx: 'I' idle, 'T' in a
// transaction, 'E' in an aborted one. For lib/pq, which looks at it before each COMMIT, it is always 'T'. Other drivers,
// and those that wrap these two, are unknown.
func transactionStatus(driverConn any) (status byte, known bool) {
	switch dialect.PackagePath(driverConn) {
	case "github.com/lib/pq":
		return 'T', true
	case "github.com/jackc/pgx/v5/stdlib":
		native := call(reflect.ValueOf(driverConn).MethodByName("Conn"))
		if !native.IsValid() {
			return 0, false
		}
		if pgConn := call(native.MethodByName("PgConn")); pgConn.IsValid() {
			if session, ok := pgConn.Interface().(interface{ TxStatus() byte }); ok {
				return session.TxStatus(), true
			}
		}
	}
	return 0, false
}

// call calls a method without arguments and with one result, and returns the result, if it is one.
func call(method reflect.Value) reflect.Value {
	if !method.IsValid() || method.Type().NumIn() != 0 || method.Type().NumOut() != 1 {
		return reflect.Value{}
	}
	return method.Call(nil)[0]
}

// createSchema takes a lock, since concurrent CREATE … IF NOT EXISTS fail with violations of the catalog's keys.
func (postgreSQL) createSchema(ctx context.Context, s *Store, statements []string) error {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte("inbox schema " + s.config.Table))
	lock := fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", int64(hash.Sum64())) //nolint:gosec // any number will do
	return s.execAll(ctx, append([]string{lock}, statements...))
}

func (postgreSQL) tableFaults(ctx context.Context, s *Store) ([]string, error) {
	name := s.table.Quoted(`"`)
	var kind, persistence string
	err := s.db.QueryRowContext(ctx, `
SELECT relkind::text, relpersistence::text FROM pg_class WHERE oid = to_regclass($1::text)`, name).Scan(&kind, &persistence)
	if errors.Is(err, sql.ErrNoRows) {
		return []string{"the table is missing"}, nil
	}
	if err != nil {
		return nil, err
	}
	var faults []string
	if kind != "r" && kind != "p" {
		faults = append(faults, "it is not a table")
	}
	if persistence != "p" {
		faults = append(faults, "the table is unlogged or temporary: a crash of the server would empty it")
	}

	columns, err := queryColumns(ctx, s.db, `
SELECT a.attname::text,
	format_type(a.atttypid, a.atttypmod) || CASE WHEN c.collisdeterministic THEN '' WHEN c.oid IS NULL THEN '' ELSE
		' COLLATE ' || c.collname END,
	a.attnotnull
FROM pg_attribute AS a
LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
WHERE a.attrelid = to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped`, name)
	if err != nil {
		return nil, err
	}
	faults = append(faults, columns.faults([]wantColumn{
		{"consumer", "text", true},
		{"message_id", "text", true},
		{"received_at", "timestamp with time zone", true},
		{"processed_at", "timestamp with time zone", true},
		{"fingerprint", "bytea", false},
		{"payload", "bytea", false},
		{"metadata", "bytea", false},
		{"outputs", "bytea", false},
		{"outputs_published_at", "timestamp with time zone", false},
	})...)

	indexes, err := queryStrings(ctx, s.db, `
SELECT CASE WHEN i.indisprimary THEN 'primary key ' WHEN i.indisunique THEN 'unique index ' ELSE 'index ' END
	|| '(' || string_agg(a.attname, ', ' ORDER BY k.position) || ')'
	|| coalesce(' WHERE ' || btrim(pg_get_expr(i.indpred, i.indrelid), '()'), '')
FROM pg_index AS i
CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k (attnum, position)
JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = to_regclass($1::text) AND i.indisvalid AND k.position <= i.indnkeyatts
GROUP BY i.indexrelid, i.indisprimary, i.indisunique, i.indpred, i.indrelid`, name)
	if err != nil {
		return nil, err
	}
	faults = append(faults, missingIndexes(indexes, "primary key (consumer, message_id)",
		"index (received_at) WHERE outputs IS NULL", "index (received_at) WHERE outputs IS NOT NULL")...)

	privileges, err := queryStrings(ctx, s.db, `
SELECT privilege
FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
WHERE NOT has_table_privilege(to_regclass($1::text), privilege)`, name)
	for _, privilege := range privileges {
		faults = append(faults, fmt.Sprintf("the user lacks the privilege %s", privilege))
	}
	return faults, err
}

// settingFaults reads a value as the store reads its records. pgx, in the modes in which the server sends text, knows one of
// the two forms that a value may have.
func (postgreSQL) settingFaults(ctx context.Context, s *Store) ([]string, error) {
	var output string
	if err := s.db.QueryRowContext(ctx, "SELECT current_setting('bytea_output')").Scan(&output); err != nil || output == "hex" {
		return nil, err
	}
	var value []byte
	err := s.db.QueryRowContext(ctx, `SELECT '\x00ff5c'::bytea`).Scan(&value)
	if err == nil && bytes.Equal(value, []byte{0, 0xff, '\\'}) {
		return nil, nil
	}
	return []string{fmt.Sprintf("bytea_output is %s, want hex: the driver cannot read it", output)}, ctx.Err()
}

func (postgreSQL) deleteExpired(ctx context.Context, s *Store, age int64, limit int) (int, error) {
	return s.expired.Delete(limit, func(limit int, after int64) (deleted int, last int64, err error) {
		err = s.db.QueryRowContext(ctx, s.statements.DeleteExpired, age, limit, after).Scan(&deleted, &last)
		return deleted, last, err
	})
}
