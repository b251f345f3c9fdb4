package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// mySQL is MySQL and MariaDB.
type mySQL struct{}

func (mySQL) statements(table dialect.Table) *dialect.Statements { return dialect.MySQL(table) }

func (mySQL) classify(err error) dialect.Class { return dialect.ClassifyMySQL(err) }

func (mySQL) claimStatement(ctx context.Context, s *Store, claim inbox.Claim) (claimStatement, error) {
	version, err := s.serverVersion(ctx)
	if err != nil {
		return claimStatement{}, err
	}
	fingerprint, payload, metadata := claimArgs(claim)
	args := []any{claim.Key.Consumer, claim.Key.MessageID, fingerprint, payload, metadata}
	if version.mariaDB {
		return claimStatement{query: s.statements.ClaimWithin(claim.LockTimeout), args: args}, nil
	}
	return claimStatement{query: s.statements.Claim, args: args, timeout: claim.LockTimeout}, nil
}

// mustSeal is always true: a deadlock undoes the transaction, and if a handler hides it, what follows is in none. So does
// DDL.
func (mySQL) mustSeal(*Tx) (bool, error) { return true, nil }

// serverVersion is what SELECT VERSION() says.
type serverVersion struct {
	mariaDB             bool
	major, minor, patch int
}

// serverVersion asks once.
func (s *Store) serverVersion(ctx context.Context) (serverVersion, error) {
	if version := s.server.Load(); version != nil {
		return *version, nil
	}
	var text string
	if err := s.db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&text); err != nil {
		return serverVersion{}, err
	}
	version := parseVersion(text)
	s.server.Store(&version)
	return version, nil
}

func parseVersion(text string) serverVersion {
	version := serverVersion{mariaDB: strings.Contains(strings.ToLower(text), "mariadb")}
	_, _ = fmt.Sscanf(text, "%d.%d.%d", &version.major, &version.minor, &version.patch)
	return version
}

// hasSkipLocked reports whether SELECT … FOR UPDATE SKIP LOCKED is known.
func (v serverVersion) hasSkipLocked() bool {
	if v.mariaDB {
		return v.major > 10 || v.major == 10 && v.minor >= 6
	}
	return v.major >= 8
}

// createSchema needs no lock: concurrent CREATE TABLE IF NOT EXISTS wait for each other on the table's metadata lock, and
// the indexes are part of the table.
func (mySQL) createSchema(ctx context.Context, s *Store, statements []string) error {
	for _, statement := range statements {
		if _, err := s.db.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

func (mySQL) tableFaults(ctx context.Context, s *Store) ([]string, error) {
	args := []any{sql.NullString{String: s.table.Schema, Valid: s.table.Schema != ""}, s.table.Name}
	var engine sql.NullString
	err := s.db.QueryRowContext(ctx, `
SELECT engine FROM information_schema.tables
WHERE table_schema = COALESCE(?, DATABASE()) AND table_name = ?`, args...).Scan(&engine)
	if errors.Is(err, sql.ErrNoRows) {
		return []string{"the table is missing"}, nil
	}
	if err != nil {
		return nil, err
	}
	var faults []string
	if engine.String != "InnoDB" {
		faults = append(faults, fmt.Sprintf("its engine is %q, want InnoDB: others have no transactions", engine.String))
	}

	columns, err := queryColumns(ctx, s.db, `
SELECT column_name,
	CASE WHEN collation_name IS NULL THEN column_type ELSE CONCAT(column_type, ' COLLATE ', collation_name) END,
	is_nullable = 'NO'
FROM information_schema.columns
WHERE table_schema = COALESCE(?, DATABASE()) AND table_name = ?
LIMIT 1000`, args...)
	if err != nil {
		return nil, err
	}
	faults = append(faults, columns.faults([]wantColumn{
		{"consumer", "varbinary(255)", true},
		{"message_id", "varbinary(255)", true},
		{"received_at", "datetime(6)", true},
		{"processed_at", "datetime(6)", false},
		{"fingerprint", "varbinary(255)", false},
		{"payload", "longblob", false},
		{"metadata", "longblob", false},
		{"outputs", "longblob", false},
		{"outputs_pending", "tinyint(1)", true},
		{"outputs_published_at", "datetime(6)", false},
	})...)

	indexes, err := queryStrings(ctx, s.db, `
SELECT CONCAT(CASE WHEN index_name = 'PRIMARY' THEN 'primary key' WHEN non_unique THEN 'index' ELSE 'unique index' END,
	' (', GROUP_CONCAT(column_name ORDER BY seq_in_index SEPARATOR ', '), ')')
FROM information_schema.statistics
WHERE table_schema = COALESCE(?, DATABASE()) AND table_name = ?
GROUP BY index_name, non_unique
LIMIT 1000`, args...)
	if err != nil {
		return nil, err
	}
	return append(faults, missingIndexes(indexes,
		"primary key (consumer, message_id)", "index (outputs_pending, received_at)")...), nil
}

// settingFaults asks for what makes a statement, or a COMMIT, something else. It looks into the driver's connection for
// readTimeout, the only thing that bounds its COMMIT, and says nothing of that if it cannot tell.
func (mySQL) settingFaults(ctx context.Context, s *Store) ([]string, error) {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	var (
		faults     []string
		autocommit bool
		safe       bool
		completion string
	)
	if err := conn.QueryRowContext(ctx, "SELECT @@autocommit, @@sql_safe_updates, @@completion_type").
		Scan(&autocommit, &safe, &completion); err != nil {
		return nil, err
	}
	if !autocommit {
		faults = append(faults, "autocommit is off: a handler's statement beside its transaction is never committed")
	}
	if safe {
		faults = append(faults, "sql_safe_updates is on: it refuses to mark outputs as published, and to delete records")
	}
	if completion != "NO_CHAIN" {
		faults = append(faults, fmt.Sprintf("completion_type is %s, want NO_CHAIN: a COMMIT does more than to commit", completion))
	}
	err = conn.Raw(func(driverConn any) error {
		if timeout, known := readTimeout(unwrap(driverConn)); known && timeout == 0 {
			faults = append(faults, "readTimeout is not set in the DSN: nothing else bounds a COMMIT whose server went silent")
		}
		return nil
	})
	return faults, err
}

func readTimeout(driverConn any) (timeout int64, known bool) {
	if guarded, ok := driverConn.(*guardedConn); ok {
		driverConn = guarded.Unwrap()
	}
	conn := reflect.ValueOf(driverConn)
	if conn.Kind() != reflect.Pointer || dialect.PackagePath(driverConn) != "github.com/go-sql-driver/mysql" {
		return 0, false
	}
	config := conn.Elem().FieldByName("cfg")
	if config.Kind() != reflect.Pointer || config.IsNil() {
		return 0, false
	}
	field := config.Elem().FieldByName("ReadTimeout")
	if field.Kind() != reflect.Int64 {
		return 0, false
	}
	return field.Int(), true
}

// deleteExpired selects and locks the rows first, since DELETE cannot skip what others have locked. READ COMMITTED keeps
// it from locking the gaps that new claims go into.
func (mySQL) deleteExpired(ctx context.Context, s *Store, age int64, limit int) (int, error) {
	version, err := s.serverVersion(ctx)
	if err != nil {
		return 0, err
	}
	query := s.statements.SelectExpired
	if version.hasSkipLocked() {
		query += " SKIP LOCKED"
	}
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	keys, err := queryKeys(ctx, tx, query, age, age, limit)
	if err != nil {
		return 0, err
	}
	deleted := 0
	for batch := range batches(keys) {
		result, err := tx.ExecContext(ctx, s.statements.DeleteKeys(len(batch)), keyArgs(batch)...)
		if err != nil {
			return 0, err
		}
		rows, err := result.RowsAffected()
		if err != nil {
			return 0, err
		}
		deleted += int(rows)
	}
	return deleted, tx.Commit()
}
