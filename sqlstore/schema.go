package sqlstore

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

//go:embed schema
var schema embed.FS

// directory returns the dialect's directory below schema.
func (d Dialect) directory() string { return strings.ToLower(d.String()) }

// Migrations returns the dialect's migrations, for tools such as golang-migrate: files named 0001_inbox.up.sql and
// 0001_inbox.down.sql, for the table "inbox". Each statement ends in a semicolon at the end of a line, and can be run any
// number of times. The files of an invalid dialect do not exist.
func Migrations(d Dialect) fs.FS {
	files, err := fs.Sub(schema, "schema/"+d.directory())
	if err != nil {
		return embed.FS{}
	}
	return files
}

// InitializeSchema creates the table and its indexes, unless they are there, by the statements of [Migrations] with the
// name of the store's table. Any number of processes may call it at the same time. A table that is there but differs from
// what the store needs is an error, as in [Store.CheckSchema].
//
// It needs the right to create tables. Where a migration tool owns the schema, use Migrations and CheckSchema instead.
func (s *Store) InitializeSchema(ctx context.Context) error {
	statements, err := s.schemaStatements()
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(schemaTimeout); ; {
		err := s.initializeSchema(ctx, statements)
		if !s.IsTransient(err) || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5*time.Millisecond + rand.N(20*time.Millisecond)): //nolint:gosec // no secret
		}
	}
}

// schemaTimeout is how long InitializeSchema tries again while others keep it from it. They do where many processes start
// at once on a SQLite file without a busy_timeout.
const schemaTimeout = 30 * time.Second

func (s *Store) initializeSchema(ctx context.Context, statements []string) error {
	if err := s.database.createSchema(ctx, s, statements); err != nil {
		return dialect.Wrap(ctx, "create table "+s.config.Table, err, "")
	}
	return s.check(ctx, s.database.tableFaults)
}

// execAll runs statements in a transaction.
func (s *Store) execAll(ctx context.Context, statements []string) error {
	return s.inTx(ctx, func(tx *sql.Tx) error {
		for _, statement := range statements {
			if _, err := tx.ExecContext(ctx, statement); err != nil {
				return err
			}
		}
		return nil
	})
}

// inTx runs fn in a transaction. What writes does so in one even for a single statement: on MySQL, autocommit may be off.
func (s *Store) inTx(ctx context.Context, fn func(*sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// CheckSchema reports everything that keeps the store from working: a missing table, columns, types, keys or indexes that
// are not those of [Migrations], collations that take different keys for one. It also reports settings that a store
// relies on: on PostgreSQL a bytea_output that the driver reads, on MySQL autocommit, completion_type, sql_safe_updates and
// the readTimeout in the DSN of github.com/go-sql-driver/mysql, on SQLite WAL and a busy_timeout.
func (s *Store) CheckSchema(ctx context.Context) error {
	return s.check(ctx, s.database.tableFaults, s.database.settingFaults)
}

func (s *Store) check(ctx context.Context, checks ...func(context.Context, *Store) ([]string, error)) error {
	var all []error
	for _, check := range checks {
		faults, err := check(ctx, s)
		if err != nil {
			return dialect.Wrap(ctx, "check table "+s.config.Table, err, "")
		}
		for _, fault := range faults {
			all = append(all, fmt.Errorf("inbox: check table %s: %s", s.config.Table, fault))
		}
	}
	return errors.Join(all...)
}

// schemaStatements returns the statements of the up migration, for the store's table.
func (s *Store) schemaStatements() ([]string, error) {
	ddl, err := fs.ReadFile(schema, "schema/"+s.config.Dialect.directory()+"/0001_inbox.up.sql")
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	for line := range strings.Lines(string(ddl)) {
		if !strings.HasPrefix(line, "--") {
			b.WriteString(line)
		}
	}
	var statements []string
	for statement := range strings.SplitSeq(s.schemaNames().Replace(b.String()), ";\n") {
		if statement = strings.TrimSpace(statement); statement != "" {
			statements = append(statements, statement)
		}
	}
	return statements, nil
}

// schemaNames puts the table's name into the DDL. PostgreSQL and MySQL create an index where its table is, and its name is
// not qualified; SQLite wants it the other way around.
func (s *Store) schemaNames() *strings.Replacer {
	index := dialect.Table{Name: s.table.Name}
	indexed := s.table
	if s.config.Dialect == SQLite {
		index.Schema, indexed.Schema = indexed.Schema, ""
	}
	named := func(suffix string) string {
		return dialect.Table{Schema: index.Schema, Name: index.Name + suffix}.Quoted(`"`)
	}
	return strings.NewReplacer(
		`"inbox_received_at_idx"`, named("_received_at_idx"),
		`"inbox_outputs_idx"`, named("_outputs_idx"),
		` ON "inbox"`, ` ON `+indexed.Quoted(`"`),
		`"inbox"`, s.table.Quoted(`"`),
		"`inbox`", s.table.Quoted("`"),
	)
}

// column is a column that a table has.
type column struct {
	kind    string
	notNull bool
}

type columns map[string]column

// wantColumn is a column that the table should have.
type wantColumn struct {
	name, kind string
	notNull    bool
}

func (c columns) faults(want []wantColumn) []string {
	var faults []string
	for _, want := range want {
		have, ok := c[want.name]
		switch {
		case !ok:
			faults = append(faults, fmt.Sprintf("column %s is missing", want.name))
			continue
		case !strings.EqualFold(have.kind, want.kind):
			faults = append(faults, fmt.Sprintf("column %s is %s, want %s", want.name, have.kind, want.kind))
		}
		switch {
		case want.notNull && !have.notNull:
			faults = append(faults, fmt.Sprintf("column %s accepts NULL", want.name))
		case !want.notNull && have.notNull:
			faults = append(faults, fmt.Sprintf("column %s does not accept NULL", want.name))
		}
	}
	return faults
}

// missingIndexes returns the faults of a table that has these indexes.
func missingIndexes(have []string, want ...string) []string {
	var faults []string
	for _, index := range want {
		if !slices.Contains(have, index) {
			faults = append(faults, index+" is missing")
		}
	}
	return faults
}

// queryColumns runs a query for name, type (with the collation, if it matters) and whether NULL is refused.
func queryColumns(ctx context.Context, db *sql.DB, query string, args ...any) (columns, error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	found := make(columns)
	for rows.Next() {
		var (
			name string
			c    column
		)
		if err := rows.Scan(&name, &c.kind, &c.notNull); err != nil {
			return nil, err
		}
		found[name] = c
	}
	return found, rows.Err()
}

func queryStrings(ctx context.Context, db *sql.DB, query string, args ...any) ([]string, error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var found []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		found = append(found, s)
	}
	return found, rows.Err()
}
