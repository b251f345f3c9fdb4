package sqlstore_test

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// age makes a record older, by the database's clock.
func age(t *testing.T, db *sql.DB, table, id string, by time.Duration) {
	t.Helper()
	ageColumns(t, db, table, id, by, "received_at", "processed_at")
}

func ageColumns(t *testing.T, db *sql.DB, table, id string, by time.Duration, columns ...string) {
	t.Helper()
	for _, column := range columns {
		past := fmt.Sprintf("%s - interval '%d microseconds'", column, by.Microseconds())
		switch {
		case fmt.Sprintf("%T", db.Driver()) == "*sqlite.Driver":
			past = fmt.Sprintf("strftime('%%Y-%%m-%%d %%H:%%M:%%f', %s, '-%.3f seconds')", column, by.Seconds())
		case fmt.Sprintf("%T", db.Driver()) == fmt.Sprintf("%T", &mysql.MySQLDriver{}):
			past = fmt.Sprintf("%s - INTERVAL %d MICROSECOND", column, by.Microseconds())
		}
		mustExec(t, db, fmt.Sprintf("UPDATE %s SET %s = %s WHERE message_id = '%s'", table, column, past, id))
	}
}

// messageIDs returns the IDs that have a record, sorted.
func messageIDs(t *testing.T, db *sql.DB, table string) string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), "SELECT message_id FROM "+table)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var ids []string
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

func deleteExpired(t *testing.T, store *sqlstore.Store, age time.Duration, limit, want int) {
	t.Helper()
	got, err := store.DeleteExpired(t.Context(), age, limit)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("deleted %d records, want %d", got, want)
	}
}

func TestDeleteExpiredIsStrictOldestFirstLimitedAndCounted(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		for id, by := range map[string]time.Duration{
			"0": 0, "59": 59 * time.Minute, "61": 61 * time.Minute, "62": 62 * time.Minute, "63": 63 * time.Minute, "999": 999 * time.Hour,
		} {
			process(t, store, id)
			age(t, db, table, id, by)
		}
		deleteExpired(t, store, time.Hour, 1, 1)
		if got := messageIDs(t, db, table); got != "0 59 61 62 63" {
			t.Errorf("left: %s", got)
		}
		deleteExpired(t, store, time.Hour, 2, 2)
		if got := messageIDs(t, db, table); got != "0 59 61" {
			t.Errorf("left: %s", got)
		}
		deleteExpired(t, store, 100*365*24*time.Hour, 10, 0)
		deleteExpired(t, store, time.Hour, 10, 1)
		deleteExpired(t, store, time.Hour, 10, 0)
		if got := messageIDs(t, db, table); got != "0 59" {
			t.Errorf("left: %s", got)
		}
		recorded(t, store, "59")
		wantUnclaimed(t, store, "61")
	})
}

func TestDeleteExpiredKeepsWhatIsNotDone(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		want := "long stranded"
		process(t, store, "stranded", message.NewMessage("output", nil))
		age(t, db, table, "stranded", 48*time.Hour)
		process(t, store, "long") // received long ago, processed just now
		ageColumns(t, db, table, "long", 48*time.Hour, "received_at")
		if target.dialect != sqlstore.PostgreSQL {
			process(t, store, "unsealed")
			age(t, db, table, "unsealed", 48*time.Hour)
			mustExec(t, db, "UPDATE "+table+" SET processed_at = NULL WHERE message_id = 'unsealed'")
			want += " unsealed"
		}
		deleteExpired(t, store, time.Hour, 10, 0)
		if got := messageIDs(t, db, table); got != want {
			t.Errorf("left: %s, want %s", got, want)
		}
		stranded, err := store.ListStranded(t.Context(), sqlstore.ListStrandedParams{})
		if err != nil || len(stranded) != 1 {
			t.Fatal(stranded, err)
		}
		if err := store.PublishStranded(t.Context(), stranded[0], "topic", &publisher{}); err != nil {
			t.Fatal(err)
		}
		deleteExpired(t, store, time.Hour, 10, 1)
	})
}

// TestDeleteExpiredPassesOverLockedRecords has one record locked by another transaction, and a claim open.
func TestDeleteExpiredPassesOverLockedRecords(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, libPQ, mariaDB}, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		for _, id := range []string{"1", "2", "3"} {
			process(t, store, id)
			age(t, db, table, id, time.Hour)
		}
		locker, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = locker.Rollback() }()
		mustExec(t, locker, "UPDATE "+table+" SET fingerprint = 'x' WHERE message_id = '2' AND consumer = 'orders'")
		tx, _ := begin(t, store, "claimed")
		deleteExpired(t, store, time.Minute, 10, 2)
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		if err := locker.Rollback(); err != nil {
			t.Fatal(err)
		}
		if got := messageIDs(t, db, table); got != "2 claimed" {
			t.Errorf("left: %s", got)
		}
	})
}

func TestSkipLockedIsUsedWhereItIsKnown(t *testing.T) {
	t.Parallel()

	for version, want := range map[string]bool{
		"10.5.23-MariaDB": false, "10.6.18-MariaDB-log": true, "10.11.19-MariaDB-0+deb12u1": true, "11.8.3-MariaDB": true,
		"5.7.44-log": false, "8.0.39": true, "8.4.2": true, "9.1.0-commercial": true, "": false, "unknown": false,
	} {
		if got := sqlstore.HasSkipLocked(version); got != want {
			t.Errorf("%q: %t", version, got)
		}
	}
}

// TestDeleteExpiredInSeveralProcesses counts every record once.
func TestDeleteExpiredInSeveralProcesses(t *testing.T) {
	t.Parallel()
	forEach(t, []target{pgxStdlib, libPQ, mariaDB}, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		const records = 300
		for i := range records {
			process(t, store, fmt.Sprint(i))
			age(t, db, table, fmt.Sprint(i), time.Hour)
		}
		deleted := make(chan int)
		for range 3 {
			go func() {
				sum := 0
				defer func() { deleted <- sum }()
				for {
					n, err := store.DeleteExpired(t.Context(), time.Minute, 20)
					if err != nil {
						t.Error(err)
						return
					}
					if sum += n; n == 0 {
						return
					}
				}
			}()
		}
		sum := 0
		for range 3 {
			sum += <-deleted
		}
		deleteExpired(t, store, time.Minute, records, records-sum) // what all had locked when they looked last
		wantCount(t, db, table, 0)
	})
}

func TestDeleteExpiredChecksItsArguments(t *testing.T) {
	t.Parallel()

	store, _, _ := newStore(t, sqliteOne)
	for _, args := range []struct {
		age   time.Duration
		limit int
	}{{-1, 1}, {0, 0}, {0, -1}} {
		_, err := store.DeleteExpired(t.Context(), args.age, args.limit)
		wantError(t, err, nil, "inbox: delete expired records: ")
	}
}

func TestOldestAge(t *testing.T) {
	t.Parallel()
	forEach(t, targets(), func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		if age, ok, err := store.OldestAge(t.Context()); age != 0 || ok || err != nil {
			t.Errorf("empty: %s, %t, %v", age, ok, err)
		}
		process(t, store, "stranded", message.NewMessage("output", nil))
		age(t, db, table, "stranded", 5*time.Hour)
		if target.dialect != sqlstore.PostgreSQL { // without a seal it is never deleted
			process(t, store, "unsealed")
			age(t, db, table, "unsealed", 5*time.Hour)
			mustExec(t, db, "UPDATE "+table+" SET processed_at = NULL WHERE message_id = 'unsealed'")
		}
		process(t, store, "old")
		age(t, db, table, "old", time.Hour)
		process(t, store, "young")
		if age, ok, err := store.OldestAge(t.Context()); age < time.Hour || age > 2*time.Hour || !ok || err != nil {
			t.Errorf("%s, %t, %v", age, ok, err)
		}
	})
}
