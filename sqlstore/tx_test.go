package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"
	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
	"github.com/watermill-inbox/inbox/sqlstore"
)

var (
	postgresTargets = []target{pgxStdlib, pgxSimple, libPQ, pgxWrapped}
	mariaDBTargets  = []target{mariaDB, mariaDBFoundRows}
	sqliteTargets   = []target{sqliteOne, sqliteSeveral}
)

const hintAborted = "put Retry and PoisonQueue outside the inbox"

func TestSwallowedErrorPreventsTheCommit(t *testing.T) {
	t.Parallel()

	for name, outputs := range map[string][]*message.Message{
		"without-outputs": nil,
		"with-outputs":    {message.NewMessage("output", nil)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			forEach(t, postgresTargets, func(t *testing.T, target target) {
				store, db, table := newStore(t, target)
				effects := newEffects(t, db)
				tx, native := begin(t, store, "m")
				mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)")
				if _, err := native.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
					t.Fatal("no error")
				}
				wantError(t, tx.Commit(t.Context(), outputs), nil, "inbox: ", hintAborted)
				wantCount(t, db, effects, 0)
				wantCount(t, db, table, 0)
				wantUnclaimed(t, store, "m")
			})
		})
	}
}

func TestExplainErrorNamesWhatWasSwallowed(t *testing.T) {
	t.Parallel()
	forEach(t, postgresTargets, func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		_, native := begin(t, store, "m")
		_, _ = native.ExecContext(t.Context(), "SELECT 1/0")
		_, err := native.ExecContext(t.Context(), "SELECT 1")
		if hint := store.ExplainError(fmt.Errorf("save order: %w", err)); hint == "" {
			t.Errorf("no hint for %v", err)
		}
		if hint := store.ExplainError(errors.New("other")); hint != "" {
			t.Errorf("hint %q for an error that is none of the database's", hint)
		}
	})
}

func TestTransactionEndedByTheHandlerIsNeverASuccess(t *testing.T) {
	t.Parallel()

	for name, end := range map[string]func(*testing.T, *sql.Tx){
		"raw-rollback": func(t *testing.T, tx *sql.Tx) {
			t.Helper()
			mustExec(t, tx, "ROLLBACK")
		},
		"rollback": func(t *testing.T, tx *sql.Tx) {
			t.Helper()
			if err := tx.Rollback(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for _, outputs := range [][]*message.Message{nil, {message.NewMessage("output", nil)}} {
			t.Run(fmt.Sprintf("%s/outputs=%d", name, len(outputs)), func(t *testing.T) {
				t.Parallel()
				forEach(t, append(targets(), pgxWrapped), func(t *testing.T, target target) {
					store, db, table := newStore(t, target)
					tx, native := begin(t, store, "m")
					end(t, native)
					wantError(t, tx.Commit(t.Context(), outputs), nil, "inbox: ", "the transaction belongs to the inbox")
					wantCount(t, db, table, 0)
					wantUnclaimed(t, store, "m")
				})
			})
		}
	}
}

func TestUnsealedRecordIsAnErrorUntilForgotten(t *testing.T) {
	t.Parallel()

	for name, commit := range map[string]string{"ddl": "CREATE TABLE %s (id INTEGER)", "raw-commit": "COMMIT"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			targets := mariaDBTargets
			if name == "raw-commit" {
				targets = append(targets[:len(targets):len(targets)], sqliteTargets...)
			}
			forEach(t, targets, func(t *testing.T, target target) {
				store, db, table := newStore(t, target)
				tx, native := begin(t, store, "m")
				if name == "ddl" {
					mustExec(t, native, fmt.Sprintf(commit, newTable(t, db)))
				} else {
					mustExec(t, native, commit)
				}
				if err := tx.Rollback(t.Context()); err != nil { // the handler returned an error
					t.Fatal(err)
				}
				wantCount(t, db, table, 1)

				for range 2 {
					_, err := store.Begin(t.Context(), claimOf("m"))
					wantError(t, err, nil, "inbox: claim key: ", `"orders"`, `"m"`, "without its seal", "Forget")
				}
				if err := store.Forget(t.Context(), claimOf("m").Key); err != nil {
					t.Fatal(err)
				}
				process(t, store, "m")
			})
		})
	}
}

// TestSwallowedDeadlockIsNeverASuccess has two transactions lock two rows crosswise. The server undoes one of them, the
// claim included, and runs what follows in autocommit mode.
func TestSwallowedDeadlockIsNeverASuccess(t *testing.T) {
	t.Parallel()
	forEach(t, mariaDBTargets, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		effects := newEffects(t, db)
		mustExec(t, db, "INSERT INTO "+effects+" VALUES (1), (2), (3), (4), (5)")
		lock := "DELETE FROM " + effects + " WHERE id = ?"

		other, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Rollback() }()
		mustExec(t, other, lock, 2)
		for id := 3; id <= 5; id++ { // the victim is who wrote less
			mustExec(t, other, lock, id)
		}
		tx, native := begin(t, store, "m")
		mustExec(t, native, lock, 1)

		waiting := make(chan error, 1)
		go func() {
			_, err := other.Exec(lock, 1) //nolint:noctx // waits for the deadlock
			waiting <- err
		}()
		_, err = native.ExecContext(t.Context(), lock, 2)
		if !store.IsTransient(err) {
			t.Fatalf("the handler got %v, want a deadlock", err)
		}
		if err := <-waiting; err != nil {
			t.Fatal(err)
		}

		wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: seal record: ", "does not own its claim")
		wantCount(t, db, table, 0)
		wantUnclaimed(t, store, "m")
	})
}

// TestInterruptedStatementIsNeverASuccess interrupts a write, upon which SQLite undoes the whole transaction.
func TestInterruptedStatementIsNeverASuccess(t *testing.T) {
	t.Parallel()
	forEach(t, sqliteTargets, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		effects := newEffects(t, db)
		tx, native := begin(t, store, "m")
		interrupt(t, native, effects+" (id)")
		mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)") // the handler hides the error
		wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: seal record: ", "does not own its claim")
		wantCount(t, db, table, 0)
		wantUnclaimed(t, store, "m")
	})
}

// TestInterruptedStatementKeepsADatabaseInMemory has one connection, which is the database.
func TestInterruptedStatementKeepsADatabaseInMemory(t *testing.T) {
	t.Parallel()

	for _, guarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("guarded=%t", guarded), func(t *testing.T) {
			t.Parallel()

			connector, err := sqlite.NewConnector(":memory:")
			if err != nil {
				t.Fatal(err)
			}
			if guarded {
				connector = sqlstore.Guard(connector)
			}
			db := sql.OpenDB(connector)
			t.Cleanup(func() { _ = db.Close() })
			db.SetMaxOpenConns(1)
			store := storeOn(t, db, sqlstore.Config{Dialect: sqlstore.SQLite})
			if err := store.InitializeSchema(t.Context()); err != nil {
				t.Fatal(err)
			}
			process(t, store, "before")
			for range 2 {
				tx, native := begin(t, store, "m")
				interrupt(t, native, "inbox (received_at)")
				wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: seal record: ")
			}
			recorded(t, store, "before")
			wantUnclaimed(t, store, "m")
		})
	}
}

// interrupt has SQLite undo the transaction.
func interrupt(t *testing.T, tx *sql.Tx, into string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := tx.ExecContext(ctx, "INSERT INTO "+into+` WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
		SELECT max(i) FROM n`)
	if err == nil {
		t.Fatal("the statement was not interrupted")
	}
}

func TestRowsLeftOpenAreNeverASilentLoss(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		effects := newEffects(t, db)
		tx, native := begin(t, store, "m")
		mustExec(t, native, "INSERT INTO "+effects+" VALUES (1), (2), (3)")
		rows, err := native.QueryContext(t.Context(), "SELECT id FROM "+effects) //nolint:sqlclosecheck // on purpose
		if err != nil || !rows.Next() {
			t.Fatal("no rows", err)
		}
		committed := 1
		if err := tx.Commit(t.Context(), []*message.Message{message.NewMessage("output", nil)}); err != nil {
			committed = 0
			wantError(t, err, nil, "inbox: seal record: ", "rows open")
		}
		wantCount(t, db, table, committed)
		wantCount(t, db, effects, 3*committed)
		if err := rows.Err(); err != nil {
			t.Log(err)
		}
	})
}

func TestClaimHeldByAnotherIsInFlight(t *testing.T) {
	t.Parallel()
	forEach(t, append(mariaDBTargets[:len(mariaDBTargets):len(mariaDBTargets)], postgresTargets...), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		begin(t, store, "m")
		db.SetMaxOpenConns(2)
		claim := claimOf("m")
		claim.LockTimeout = 100 * time.Millisecond
		_, err := store.Begin(t.Context(), claim)
		wantError(t, err, inbox.ErrInFlight, "inbox: message in flight: ")
		if store.IsTransient(err) {
			t.Errorf("%v is transient", err)
		}
		wantUnclaimed(t, store, "other")
	})
}

// TestClaimHeldByAnotherIsInFlightOnMySQL has MariaDB pass for MySQL, which cannot bound one statement's wait: the claim's
// context does, and its connection is lost.
func TestClaimHeldByAnotherIsInFlightOnMySQL(t *testing.T) {
	t.Parallel()
	forEach(t, append(mariaDBTargets[:len(mariaDBTargets):len(mariaDBTargets)], guardedMariaDB), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		store.PretendVersion("8.4.2")
		db.SetMaxOpenConns(2)
		tx, _ := begin(t, store, "m")
		claim := claimOf("m")
		claim.LockTimeout = 50 * time.Millisecond
		for range 3 {
			_, err := store.Begin(t.Context(), claim)
			wantError(t, err, inbox.ErrInFlight, "inbox: message in flight: ")
			if store.IsTransient(err) {
				t.Errorf("%v is transient", err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := store.Begin(ctx, claimOf("m"))
		wantError(t, err, context.DeadlineExceeded, "inbox: claim key: ")
		if errors.Is(err, inbox.ErrInFlight) {
			t.Errorf("%v: the context ended, which says nothing of the message", err)
		}
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		recorded(t, store, "m")
	})
}

// TestClaimWaitIsBoundedForTheClaimAlone looks at the session's own setting from inside of a handler.
func TestClaimWaitIsBoundedForTheClaimAlone(t *testing.T) {
	t.Parallel()
	forEach(t, append(mariaDBTargets[:len(mariaDBTargets):len(mariaDBTargets)], postgresTargets...), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		db.SetMaxOpenConns(1)
		set, show, want := "SET lock_timeout = '7s'", "SELECT current_setting('lock_timeout')", "7s"
		if target.dialect == sqlstore.MySQL {
			set, show, want = "SET SESSION innodb_lock_wait_timeout = 7", "SELECT @@innodb_lock_wait_timeout", "7"
		}
		mustExec(t, db, set)
		for _, id := range []string{"first", "second"} {
			tx, native := begin(t, store, id)
			var got string
			if err := native.QueryRowContext(t.Context(), show).Scan(&got); err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("the handler's lock timeout is %s, want %s", got, want)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestBusyFileIsTransientAndNotInFlight(t *testing.T) {
	t.Parallel()

	db := open(t, "sqlite", sqliteDSN(t, 20*time.Millisecond))
	store := storeOn(t, db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err := store.InitializeSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	begin(t, store, "m")
	for _, id := range []string{"m", "other"} {
		_, err := store.Begin(t.Context(), claimOf(id))
		wantError(t, err, nil, "inbox: claim key: ")
		if errors.Is(err, inbox.ErrInFlight) || !store.IsTransient(err) {
			t.Errorf("%v: want transient, not in flight", err)
		}
	}
}

func TestSerializationFailureAtTheClaimIsTransient(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, libPQ}, func(t *testing.T, target target) {
		_, db, table := newStore(t, target)
		store := storeOn(t, db, sqlstore.Config{
			Dialect: target.dialect, Table: table, TxOptions: sql.TxOptions{Isolation: sql.LevelRepeatableRead},
		})
		first, _ := begin(t, store, "m")
		waited := make(chan error, 1)
		go func() {
			tx, err := store.Begin(t.Context(), claimOf("m"))
			if err == nil {
				err = errors.Join(errors.New("the second claim succeeded"), tx.Rollback(t.Context()))
			}
			waited <- err
		}()
		awaitWaiter(t, db, table)
		if err := first.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if err := <-waited; !store.IsTransient(err) {
			t.Errorf("%v is not transient", err)
		}
		recorded(t, store, "m")
	})
}

// awaitWaiter waits until a claim waits for another one.
func awaitWaiter(t *testing.T, db *sql.DB, table string) {
	t.Helper()
	for {
		var waiting bool
		err := db.QueryRowContext(t.Context(), `SELECT EXISTS (
			SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO "`+table+`"%')`).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
		if waiting {
			return
		}
	}
}

func TestLongTransactionIsRecordedWhenItEnds(t *testing.T) {
	t.Parallel()
	forEach(t, postgresTargets, func(t *testing.T, target target) {
		store, _, _ := newStore(t, target)
		tx, native := begin(t, store, "m")
		mustExec(t, native, "SELECT pg_sleep(0.2)")
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		record := recorded(t, store, "m")
		if took := record.ProcessedAt.Sub(record.ReceivedAt); took < 200*time.Millisecond {
			t.Errorf("processed %s after it was received, want at least the 200ms that its handler took", took)
		}
	})
}

func TestWaitForTheLastConnectionEndsWithTheContext(t *testing.T) {
	t.Parallel()
	forEach(t, append(targets(), pgxWrapped), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		db.SetMaxOpenConns(1)
		process(t, store, "warm") // nothing is left to be prepared
		begin(t, store, "m")
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := store.Begin(ctx, claimOf("other"))
		wantError(t, err, context.DeadlineExceeded, "inbox: ", "second connection")
	})
}

// TestContextOfBeginDoesNotEndTheTransaction is why the transaction has a context of its own.
func TestContextOfBeginDoesNotEndTheTransaction(t *testing.T) {
	t.Parallel()
	forEach(t, append(targets(), pgxWrapped), func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		effects := newEffects(t, db)
		ctx, cancel := context.WithCancel(t.Context())
		tx, err := store.Begin(ctx, claimOf("m"))
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		mustExec(t, tx.Native().(*sql.Tx), "INSERT INTO "+effects+" VALUES (1)")
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		recorded(t, store, "m")
		wantCount(t, db, effects, 1)
	})
}

func TestCommitAfterItsContextEndedCommitsNothing(t *testing.T) {
	t.Parallel()
	forEach(t, append(targets(), pgxWrapped), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		tx, _ := begin(t, store, "m")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		wantError(t, tx.Commit(ctx, nil), context.Canceled, "inbox: ")
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
		wantCount(t, db, table, 0)
		wantUnclaimed(t, store, "m")
	})
}

func TestStalledConnectionDoesNotHoldTheCommit(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, pgxSimple}, func(t *testing.T, target target) { // lib/pq waits for the network
		_, _, table := newStore(t, target)
		proxy, dsn := wireproxy.Through(t, postgresDSN(t))
		store := storeOn(t, open(t, "pgx", dsn), sqlstore.Config{Dialect: target.dialect, Table: table})
		tx, _ := begin(t, store, "m")
		trap := proxy.Arm(wireproxy.Fault{Kind: wireproxy.Stall, Match: wireproxy.Statement("commit")})
		defer trap.Release()
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-trap.Done()
			cancel()
		}()
		wantError(t, tx.Commit(ctx, nil), context.Canceled, "inbox: commit: ")
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// TestSlowCommitEndsWithItsContext has a deferred trigger keep the COMMIT busy.
func TestSlowCommitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	forEach(t, postgresTargets, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		effects := newEffects(t, db)
		mustExec(t, db, "CREATE FUNCTION "+effects+"_sleep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$")
		t.Cleanup(func() { mustExec(t, db, "DROP FUNCTION "+effects+"_sleep CASCADE") })
		mustExec(t, db, "CREATE CONSTRAINT TRIGGER sleep AFTER INSERT ON "+effects+
			" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION "+effects+"_sleep()")
		tx, native := begin(t, store, "m")
		var pid int
		if err := native.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
		mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)")
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			defer cancel()
			for asleep := false; !asleep; {
				err := db.QueryRowContext(t.Context(),
					"SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1 AND wait_event IS NOT NULL", pid).Scan(&asleep)
				if err != nil && !errors.Is(err, sql.ErrNoRows) {
					t.Error(err)
					return
				}
			}
		}()
		wantError(t, tx.Commit(ctx, nil), context.Canceled, "inbox: commit: ")
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
		wantUnclaimed(t, store, "m")
		wantCount(t, db, table, 0)
		wantCount(t, db, effects, 0)
	})
}

// TestLostReplyOfCommitIsFoundOutByTheNextClaim cuts the connection after the server committed.
func TestLostReplyOfCommitIsFoundOutByTheNextClaim(t *testing.T) {
	t.Parallel()
	for _, target := range []target{pgxStdlib, libPQ, mariaDB} {
		for kind, committed := range map[wireproxy.Kind]bool{wireproxy.CutBefore: false, wireproxy.CutAfter: true} {
			t.Run(fmt.Sprintf("%s/%s", target.name, kind), func(t *testing.T) {
				t.Parallel()

				_, _, table := newStore(t, target)
				driver, dsn := "pgx", postgresDSN
				switch target.name {
				case libPQ.name:
					driver = "postgres"
				case mariaDB.name:
					driver, dsn = "mysql", mariaDBDSN
				}
				proxy, proxied := wireproxy.Through(t, dsn(t))
				store := storeOn(t, open(t, driver, proxied), sqlstore.Config{Dialect: target.dialect, Table: table})
				tx, _ := begin(t, store, "m")
				proxy.Arm(wireproxy.Fault{Kind: kind, Match: wireproxy.Statement("commit")})
				wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: commit: ")
				if err := tx.Rollback(t.Context()); err != nil {
					t.Error(err)
				}
				if committed {
					recorded(t, store, "m")
				} else {
					wantUnclaimed(t, store, "m")
				}
			})
		}
	}
}

func TestLostConnectionReleasesTheClaim(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, pgxSimple, libPQ, mariaDB}, func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		tx, native := begin(t, store, "m")
		id, kill := "SELECT pg_backend_pid()", "SELECT pg_terminate_backend($1)"
		if target.dialect == sqlstore.MySQL {
			id, kill = "SELECT CONNECTION_ID()", "KILL ?"
		}
		var pid int
		if err := native.QueryRowContext(t.Context(), id).Scan(&pid); err != nil {
			t.Fatal(err)
		}
		mustExec(t, db, kill, pid)
		wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: ")
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
		wantUnclaimed(t, store, "m")
	})
}

// TestLostIdleConnectionIsReplaced ends the connections in the pool, as a restart of the server does.
func TestLostIdleConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, pgxSimple, pgxWrapped, libPQ, mariaDB, guardedMariaDB}, func(t *testing.T, target target) {
		store, _, table := newStore(t, target)
		process(t, store, "before")
		admin := target.open(t)
		idle := target.open(t)
		idle.SetMaxIdleConns(4)
		store = storeOn(t, idle, sqlstore.Config{Dialect: target.dialect, Table: table})
		id, kill := "SELECT pg_backend_pid()", "SELECT pg_terminate_backend($1, 10000)"
		if target.dialect == sqlstore.MySQL {
			id, kill = "SELECT CONNECTION_ID()", "KILL ?"
		}
		var (
			open []inbox.Tx
			pids [4]int
		)
		for i := range pids {
			tx, native := begin(t, store, fmt.Sprint(i))
			open = append(open, tx)
			if err := native.QueryRowContext(t.Context(), id).Scan(&pids[i]); err != nil {
				t.Fatal(err)
			}
		}
		for _, tx := range open {
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if got := idle.Stats().Idle; got != len(pids) {
			t.Fatalf("%d connections are idle, want %d", got, len(pids))
		}
		for _, pid := range pids {
			mustExec(t, admin, kill, pid)
		}
		for i := range pids {
			process(t, store, fmt.Sprint(i))
		}
		recorded(t, store, "before")
	})
}

func TestStaleStatementsAreReplaced(t *testing.T) {
	t.Parallel()

	for name, spoil := range map[string]string{
		"deallocated":    "DEALLOCATE ALL",
		"result-changed": `ALTER TABLE {table} ALTER COLUMN fingerprint TYPE text USING fingerprint::text`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			forEach(t, []target{pgxStdlib, libPQ}, func(t *testing.T, target target) {
				store, db, table := newStore(t, target)
				db.SetMaxOpenConns(1)
				process(t, store, "m")
				recorded(t, store, "m")
				mustExec(t, db, strings.ReplaceAll(spoil, "{table}", table))
				recorded(t, store, "m")
				if name == "deallocated" {
					process(t, store, "n")
					recorded(t, store, "n")
				}
			})
		})
	}
}

func TestStatementsAreNotPreparedIfDisabled(t *testing.T) {
	t.Parallel()

	for _, disabled := range []bool{false, true} {
		t.Run(fmt.Sprint(disabled), func(t *testing.T) {
			t.Parallel()

			_, direct, table := newStore(t, libPQ)
			db := libPQ.open(t)
			db.SetMaxOpenConns(1)
			store := storeOn(t, db, sqlstore.Config{
				Dialect: sqlstore.PostgreSQL, Table: table, DisablePreparedStatements: disabled,
			})
			process(t, store, "m")
			var prepared int
			if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM pg_prepared_statements").Scan(&prepared); err != nil {
				t.Fatal(err)
			}
			if (prepared == 0) != disabled {
				t.Errorf("%d statements are prepared", prepared)
			}
			recorded(t, storeOn(t, direct, sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: table}), "m")
		})
	}
}

// TestTimesDoNotDependOnSettings reads and writes records under settings that shift what a driver makes of a DATETIME.
func TestTimesDoNotDependOnSettings(t *testing.T) {
	t.Parallel()

	_, db, table := newStore(t, mariaDB)
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	if err != nil {
		t.Fatal(err)
	}
	var stores []*sqlstore.Store
	for _, change := range []func(*mysql.Config){
		func(*mysql.Config) {},
		func(c *mysql.Config) { c.ParseTime = true },
		func(c *mysql.Config) { c.ParseTime, c.Loc = true, tokyo },
		func(c *mysql.Config) { c.Loc = tokyo },
		func(c *mysql.Config) { c.Params = map[string]string{"time_zone": "'-08:00'"} },
		func(c *mysql.Config) { c.InterpolateParams = true },
	} {
		db := open(t, "mysql", mysqlDSN(t, change))
		stores = append(stores, storeOn(t, db, sqlstore.Config{Dialect: sqlstore.MySQL, Table: table}))
	}
	checkTimes(t, db, stores)

	_, db, table = newStore(t, pgxStdlib)
	stores = nil
	for _, driver := range []string{"pgx", "postgres"} {
		for _, zone := range []string{"UTC", "Asia/Tokyo", "America/Los_Angeles"} {
			db := open(t, driver, withParam(postgresDSN(t), "timezone="+zone))
			stores = append(stores, storeOn(t, db, sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: table}))
		}
	}
	checkTimes(t, db, stores)
}

func checkTimes(t *testing.T, db *sql.DB, stores []*sqlstore.Store) {
	t.Helper()
	var now int64
	query := "SELECT CAST(extract(epoch FROM clock_timestamp()) AS bigint)"
	if _, ok := db.Driver().(*mysql.MySQLDriver); ok {
		query = "SELECT UNIX_TIMESTAMP()"
	}
	if err := db.QueryRowContext(t.Context(), query).Scan(&now); err != nil {
		t.Fatal(err)
	}
	for i, writer := range stores {
		id := fmt.Sprint("m", i)
		process(t, writer, id)
		want := recorded(t, writer, id)
		if d := want.ReceivedAt.Sub(time.Unix(now, 0)); d < -time.Minute || d > time.Minute {
			t.Errorf("store %d: received %s from now", i, d)
		}
		if d := want.ProcessedAt.Sub(want.ReceivedAt); d < 0 || d > time.Minute {
			t.Errorf("store %d: processed %s after it was received", i, d)
		}
		for j, reader := range stores {
			if got := recorded(t, reader, id); !got.ReceivedAt.Equal(want.ReceivedAt) || !got.ProcessedAt.Equal(want.ProcessedAt) {
				t.Errorf("store %d reads %v, %v, store %d %v, %v", j, got.ReceivedAt, got.ProcessedAt, i, want.ReceivedAt, want.ProcessedAt)
			}
			if deleted, err := reader.DeleteExpired(t.Context(), time.Minute, 10); err != nil || deleted != 0 {
				t.Errorf("store %d deleted %d that are younger than a minute, %v", j, deleted, err)
			}
		}
	}
}

// TestASessionThatTheHandlerLeftChangedIsExplained has the seal look for the table in another schema, or look at it as
// somebody who must not.
func TestASessionThatTheHandlerLeftChangedIsExplained(t *testing.T) {
	t.Parallel()
	output := []*message.Message{message.NewMessage("output", nil)}
	forEach(t, []target{pgxStdlib, pgxSimple, libPQ}, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		other := newTableName()
		mustExec(t, db, "CREATE SCHEMA "+other)
		mustExec(t, db, "CREATE TABLE "+other+"."+table+" (LIKE "+table+")")
		mustExec(t, db, "CREATE ROLE "+other)
		t.Cleanup(func() {
			mustExec(t, db, "DROP SCHEMA "+other+" CASCADE")
			mustExec(t, db, "DROP ROLE "+other)
		})
		for _, change := range []string{
			"SET LOCAL search_path = pg_catalog",
			"SET LOCAL search_path = there_is_none",
			"SET LOCAL search_path = " + other,
			"SET LOCAL ROLE " + other,
		} {
			tx, native := begin(t, store, "id")
			mustExec(t, native, change)
			wantError(t, tx.Commit(t.Context(), output), nil, "inbox: seal record: ", "the handler left ", "search_path")
			wantUnclaimed(t, store, "id")
		}
	})
}
