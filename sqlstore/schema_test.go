package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// dialectTargets has one target of each dialect.
var dialectTargets = []target{pgxStdlib, mariaDB, sqliteSeveral}

func TestInitializeSchemaIsIdempotent(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		process(t, store, "m")
		if err := store.InitializeSchema(t.Context()); err != nil {
			t.Error(err)
		}
		if err := store.CheckSchema(t.Context()); err != nil {
			t.Error(err)
		}
		recorded(t, store, "m")
	})
}

func TestInitializeSchemaByTwentyAtOnce(t *testing.T) {
	t.Parallel()

	file := "file:" + filepath.Join(t.TempDir(), "inbox.db") // without busy_timeout
	for _, target := range []target{
		pgxStdlib, libPQ, mariaDB,
		{"sqlite", sqlstore.SQLite, func(tb testing.TB) *sql.DB {
			tb.Helper()
			return open(tb, "sqlite", file)
		}},
	} {
		t.Run(target.name, func(t *testing.T) {
			t.Parallel()

			table := newTable(t, target.open(t))
			stores := make([]*sqlstore.Store, 20)
			for i := range stores {
				db := target.open(t) // each as in a process of its own
				if err := db.PingContext(t.Context()); err != nil {
					t.Fatal(err)
				}
				stores[i] = storeOn(t, db, sqlstore.Config{Dialect: target.dialect, Table: table})
			}
			start, errs := make(chan struct{}), make(chan error)
			for _, store := range stores {
				go func() {
					<-start
					errs <- store.InitializeSchema(t.Context())
				}()
			}
			close(start)
			for range stores {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
			process(t, stores[0], "m")
			recorded(t, stores[1], "m")
		})
	}
}

func TestQualifiedTableNames(t *testing.T) {
	t.Parallel()

	other := newTableName()
	for _, test := range []struct {
		target       target
		create, drop string
	}{
		{pgxStdlib, `CREATE SCHEMA "` + other + `"`, `DROP SCHEMA "` + other + `" CASCADE`},
		{mariaDB, "CREATE DATABASE `" + other + "`", "DROP DATABASE `" + other + "`"},
		{sqliteOne, "ATTACH DATABASE ':memory:' AS " + other, "DETACH DATABASE " + other},
	} {
		t.Run(test.target.name, func(t *testing.T) {
			t.Parallel()

			db := test.target.open(t)
			mustExec(t, db, test.create)
			t.Cleanup(func() { mustExec(t, db, test.drop) })
			store := storeOn(t, db, sqlstore.Config{Dialect: test.target.dialect, Table: other + ".Inbox"})
			wantError(t, store.CheckSchema(t.Context()), nil, "the table is missing")
			for range 2 {
				if err := store.InitializeSchema(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if err := store.CheckSchema(t.Context()); err != nil {
				t.Error(err)
			}
			process(t, store, "m")
			recorded(t, store, "m")
		})
	}
}

// TestMigrationsUpDownUp runs the files as a migration tool does, in a database of their own.
func TestMigrationsUpDownUp(t *testing.T) {
	t.Parallel()

	other := newTableName()
	for _, test := range []struct {
		target       target
		create, drop string
		driver       string
		dsn          func(*testing.T) string
	}{
		{
			pgxStdlib, "CREATE SCHEMA " + other, "DROP SCHEMA " + other + " CASCADE", "pgx",
			func(t *testing.T) string { t.Helper(); return withParam(postgresDSN(t), "search_path="+other) },
		},
		{
			mariaDB, "CREATE DATABASE " + other, "DROP DATABASE " + other, "mysql",
			func(t *testing.T) string {
				t.Helper()
				return mysqlDSN(t, func(c *mysql.Config) { c.DBName = other })
			},
		},
		{sqliteSeveral, "", "", "sqlite", func(t *testing.T) string { t.Helper(); return sqliteDSN(t, busyTimeout) }},
	} {
		t.Run(test.target.name, func(t *testing.T) {
			t.Parallel()

			if test.create != "" {
				admin := test.target.open(t)
				mustExec(t, admin, test.create)
				t.Cleanup(func() { mustExec(t, admin, test.drop) })
			}
			db := open(t, test.driver, test.dsn(t))
			store := storeOn(t, db, sqlstore.Config{Dialect: test.target.dialect})
			migrate := func(name string) {
				t.Helper()
				file, err := fs.ReadFile(sqlstore.Migrations(test.target.dialect), name)
				if err != nil {
					t.Fatal(err)
				}
				for statement := range strings.SplitSeq(string(file), ";\n") {
					if strings.TrimSpace(statement) != "" {
						mustExec(t, db, statement)
					}
				}
			}
			for range 2 {
				migrate("0001_inbox.up.sql")
				if err := store.CheckSchema(t.Context()); err != nil {
					t.Error(err)
				}
				if err := store.InitializeSchema(t.Context()); err != nil {
					t.Error(err)
				}
				process(t, store, "m")
				migrate("0001_inbox.down.sql")
				wantError(t, store.CheckSchema(t.Context()), nil, "the table is missing")
			}
			migrate("0001_inbox.up.sql")
			process(t, store, "m")
		})
	}
}

func TestMigrationsHaveAPairOfFilesPerDialect(t *testing.T) {
	t.Parallel()

	for _, dialect := range []sqlstore.Dialect{sqlstore.PostgreSQL, sqlstore.MySQL, sqlstore.SQLite} {
		names, err := fs.Glob(sqlstore.Migrations(dialect), "*")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(names, " "); got != "0001_inbox.down.sql 0001_inbox.up.sql" {
			t.Errorf("%s has the files %q", dialect, got)
		}
	}
	if names, _ := fs.Glob(sqlstore.Migrations(0), "*"); len(names) != 0 {
		t.Errorf("the zero dialect has the files %q", names)
	}
}

func TestMissingTableIsNamed(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		db := target.open(t)
		store := storeOn(t, db, sqlstore.Config{Dialect: target.dialect, Table: "not_there"})
		for range 2 {
			_, err := store.Begin(t.Context(), claimOf("m"))
			wantError(t, err, nil, "inbox: ", "not_there", "InitializeSchema")
		}
		wantError(t, store.CheckSchema(t.Context()), nil, "not_there: the table is missing")
	})
}

// TestCheckSchemaNamesWhatIsWrong changes one thing at a time about a good table.
func TestCheckSchemaNamesWhatIsWrong(t *testing.T) {
	t.Parallel()

	type fault struct{ change, want string }
	for _, test := range []struct {
		target target
		faults map[string]fault
	}{
		{pgxStdlib, map[string]fault{
			"Column":        {"ALTER TABLE {table} DROP COLUMN fingerprint", "column fingerprint is missing"},
			"OutputsColumn": {"ALTER TABLE {table} DROP COLUMN outputs", "index (received_at) WHERE outputs IS NULL is missing"},
			"Type":          {"ALTER TABLE {table} ALTER payload TYPE text USING ''", "column payload is text, want bytea"},
			"TimeType": {
				"ALTER TABLE {table} ALTER received_at TYPE timestamp",
				"column received_at is timestamp without time zone, want timestamp with time zone",
			},
			"KeyType": {
				"ALTER TABLE {table} ALTER message_id TYPE character(40)", "column message_id is character(40), want text",
			},
			"Collation": {
				`CREATE COLLATION {table}_c (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
				ALTER TABLE {table} ALTER message_id TYPE text COLLATE {table}_c`,
				"column message_id is text COLLATE {table}_c, want text",
			},
			"NotNull":    {"ALTER TABLE {table} ALTER processed_at DROP NOT NULL", "column processed_at accepts NULL"},
			"Null":       {"ALTER TABLE {table} ALTER fingerprint SET NOT NULL", "column fingerprint does not accept NULL"},
			"PrimaryKey": {"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey", "primary key (consumer, message_id) is missing"},
			"KeyOrder": {
				"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ADD PRIMARY KEY (message_id, consumer)",
				"primary key (consumer, message_id) is missing",
			},
			"KeyColumns": {
				"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ADD PRIMARY KEY (message_id)",
				"primary key (consumer, message_id) is missing",
			},
			"CleanupIndex":  {`DROP INDEX {table}_received_at_idx`, "index (received_at) WHERE outputs IS NULL is missing"},
			"StrandedIndex": {`DROP INDEX {table}_outputs_idx`, "index (received_at) WHERE outputs IS NOT NULL is missing"},
			"Unlogged":      {"ALTER TABLE {table} SET UNLOGGED", "unlogged"},
			"View": {
				"ALTER TABLE {table} RENAME TO {table}_2; CREATE VIEW {table} AS SELECT * FROM {table}_2", "it is not a table",
			},
		}},
		{mariaDB, map[string]fault{
			"Column":        {"ALTER TABLE {table} DROP COLUMN fingerprint", "column fingerprint is missing"},
			"PendingColumn": {"ALTER TABLE {table} DROP COLUMN outputs_pending", "column outputs_pending is missing"},
			"Type":          {"ALTER TABLE {table} MODIFY outputs BLOB", "column outputs is blob, want longblob"},
			"Precision": {
				"ALTER TABLE {table} MODIFY received_at DATETIME NOT NULL", "column received_at is datetime, want datetime(6)",
			},
			"Collation": {
				"ALTER TABLE {table} MODIFY message_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NOT NULL",
				"column message_id is varchar(255) COLLATE utf8mb4_general_ci, want varbinary(255)",
			},
			"KeyLength": {
				"ALTER TABLE {table} MODIFY consumer VARBINARY(100) NOT NULL",
				"column consumer is varbinary(100), want varbinary(255)",
			},
			"Null":       {"ALTER TABLE {table} MODIFY processed_at DATETIME(6) NOT NULL", "column processed_at does not accept NULL"},
			"PrimaryKey": {"ALTER TABLE {table} DROP PRIMARY KEY", "primary key (consumer, message_id) is missing"},
			"KeyOrder": {
				"ALTER TABLE {table} DROP PRIMARY KEY, ADD PRIMARY KEY (message_id, consumer)",
				"primary key (consumer, message_id) is missing",
			},
			"Index":  {"ALTER TABLE {table} DROP INDEX outputs_pending_received_at", "index (outputs_pending, received_at) is missing"},
			"Engine": {"ALTER TABLE {table} ENGINE = MyISAM", "want InnoDB"},
		}},
		{sqliteSeveral, map[string]fault{
			"Column":        {"ALTER TABLE {table} DROP COLUMN fingerprint", "column fingerprint is missing"},
			"CleanupIndex":  {"DROP INDEX {table}_received_at_idx", "index (received_at) WHERE outputs IS NULL is missing"},
			"StrandedIndex": {"DROP INDEX {table}_outputs_idx", "index (received_at) WHERE outputs IS NOT NULL is missing"},
			"Index": {
				"DROP INDEX {table}_outputs_idx; CREATE INDEX {table}_outputs_idx ON {table} (received_at)",
				"index (received_at) WHERE outputs IS NOT NULL is missing",
			},
			"Collation": {sqliteTable("message_id TEXT NOT NULL COLLATE NOCASE"), "primary key (consumer, message_id) is missing"},
			"Type":      {sqliteTable("message_id BLOB NOT NULL"), "column message_id is BLOB, want TEXT"},
			"Rowid": {
				sqliteTable("message_id TEXT") + "; " + sqliteIndexes, "column message_id accepts NULL",
			},
		}},
	} {
		for name, fault := range test.faults {
			t.Run(test.target.name+"/"+name, func(t *testing.T) {
				t.Parallel()

				store, db, table := newStore(t, test.target)
				in := strings.NewReplacer("{table}", table).Replace
				for statement := range strings.SplitSeq(in(fault.change), "; ") {
					mustExec(t, db, statement)
				}
				t.Cleanup(func() { // what newTable does not know of
					for _, drop := range []string{"VIEW IF EXISTS " + table, "TABLE IF EXISTS " + table + "_2", "TABLE IF EXISTS " + table} {
						_, _ = db.ExecContext(context.WithoutCancel(t.Context()), "DROP "+drop)
					}
					if name == "Collation" && test.target.dialect == sqlstore.PostgreSQL {
						mustExec(t, db, "DROP COLLATION "+table+"_c")
					}
				})
				wantError(t, store.CheckSchema(t.Context()), nil, "inbox: check table "+table+": ", in(fault.want))
				if strings.Contains(fault.want, "column") {
					wantError(t, store.InitializeSchema(t.Context()), nil, in(fault.want))
				}
			})
		}
	}
}

// sqliteTable replaces the table by one with another column for the message ID.
func sqliteTable(messageID string) string {
	return "DROP TABLE {table}; CREATE TABLE {table} (consumer TEXT NOT NULL, " + messageID + `, received_at TEXT NOT NULL,
		processed_at TEXT, fingerprint BLOB, payload BLOB, metadata BLOB, outputs BLOB, outputs_published_at TEXT,
		PRIMARY KEY (consumer, message_id))`
}

const sqliteIndexes = `CREATE INDEX {table}_received_at_idx ON {table} (received_at) WHERE outputs IS NULL; ` +
	`CREATE INDEX {table}_outputs_idx ON {table} (received_at) WHERE outputs IS NOT NULL`

func TestCheckSchemaNamesMissingPrivileges(t *testing.T) {
	t.Parallel()

	_, db, table := newStore(t, pgxStdlib)
	role := newTableName()
	mustExec(t, db, "CREATE ROLE "+role)
	t.Cleanup(func() {
		mustExec(t, db, "DROP OWNED BY "+role)
		mustExec(t, db, "DROP ROLE "+role)
	})
	mustExec(t, db, "GRANT SELECT, INSERT, UPDATE ON "+table+" TO "+role)

	limited := open(t, "pgx", withParam(postgresDSN(t), "role="+role))
	store := storeOn(t, limited, sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: table})
	wantError(t, store.CheckSchema(t.Context()), nil, "the user lacks the privilege DELETE")
	mustExec(t, db, "GRANT DELETE ON "+table+" TO "+role)
	if err := store.CheckSchema(t.Context()); err != nil {
		t.Error(err)
	}
	process(t, store, "m")
}

func TestCheckSchemaNamesSettings(t *testing.T) {
	t.Parallel()

	file := func() string { return "file:" + filepath.Join(t.TempDir(), "inbox.db") }
	for name, test := range map[string]struct {
		dialect     sqlstore.Dialect
		driver, dsn string
		want        []string
	}{
		"SQLite":            {sqlstore.SQLite, "sqlite", file(), []string{"journal_mode", "busy_timeout"}},
		"SQLiteWAL":         {sqlstore.SQLite, "sqlite", file() + "?_pragma=journal_mode(WAL)", []string{"busy_timeout"}},
		"SQLiteBusyTimeout": {sqlstore.SQLite, "sqlite", file() + "?_pragma=busy_timeout(1000)", []string{"journal_mode"}},
		"SQLiteMemory":      {sqlstore.SQLite, "sqlite", ":memory:", nil},
		"PgxEscape":         {sqlstore.PostgreSQL, "pgx", "default_query_exec_mode=simple_protocol", []string{"bytea_output"}},
		"PgxBinary":         {sqlstore.PostgreSQL, "pgx", "", nil},
		"LibPQEscape":       {sqlstore.PostgreSQL, "postgres", "", nil},
		"MariaDB":           {sqlstore.MySQL, "mysql", "", []string{"readTimeout"}},
		"MariaDBChain":      {sqlstore.MySQL, "mysql", "completion_type=1", []string{"completion_type is CHAIN", "readTimeout"}},
		"MariaDBSafe":       {sqlstore.MySQL, "mysql", "sql_safe_updates=1", []string{"sql_safe_updates is on", "readTimeout"}},
		"MariaDBFewRows":    {sqlstore.MySQL, "mysql", "sql_select_limit=3", []string{"readTimeout"}},
		"MariaDBOracle":     {sqlstore.MySQL, "mysql", "sql_mode='ORACLE'", []string{"readTimeout"}},
		"MariaDBNoEmpty":    {sqlstore.MySQL, "mysql", "sql_mode='EMPTY_STRING_IS_NULL'", []string{"readTimeout"}},
		"MariaDBAutocommit": {sqlstore.MySQL, "mysql", "autocommit=0", []string{"autocommit is off", "readTimeout"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			if test.dialect == sqlstore.PostgreSQL {
				test.dsn = withParam(withParam(postgresDSN(t), "bytea_output=escape"), test.dsn)
			}
			if test.driver == "mysql" {
				test.dsn = mysqlDSN(t, func(c *mysql.Config) {
					c.ReadTimeout = 0
					if name, value, ok := strings.Cut(test.dsn, "="); ok {
						c.Params = map[string]string{name: value}
					}
				})
			}
			db := open(t, test.driver, test.dsn)
			db.SetMaxOpenConns(1)
			store := storeOn(t, db, sqlstore.Config{Dialect: test.dialect, Table: newTable(t, db)})
			if err := store.InitializeSchema(t.Context()); err != nil {
				t.Fatal(err)
			}
			err := store.CheckSchema(t.Context())
			if len(test.want) == 0 && err != nil {
				t.Error(err)
			}
			for _, want := range test.want {
				wantError(t, err, nil, want)
			}
			if lines := strings.Count(fmt.Sprint(err), "\n") + 1; err != nil && lines != len(test.want) {
				t.Errorf("%d faults, want %d:\n%v", lines, len(test.want), err)
			}
		})
	}
}
