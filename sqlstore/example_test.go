package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"time"

	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// A repository that runs its statements on the store's Executor takes part in the transaction of whichever handler calls
// it.
func ExampleStore_Executor() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	db.SetMaxOpenConns(1) // a database in memory is gone with its connection

	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.InitializeSchema(ctx); err != nil {
		log.Fatal(err)
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}

	addOrder := func(ctx context.Context, id int) error {
		_, err := store.Executor(ctx).ExecContext(ctx, "INSERT INTO orders (id) VALUES (?)", id)
		return err
	}
	countOrders := func(ctx context.Context) (count int) {
		if err := store.Executor(ctx).QueryRowContext(ctx, "SELECT count(*) FROM orders").Scan(&count); err != nil {
			log.Fatal(err)
		}
		return count
	}
	if _, err := db.ExecContext(ctx, "CREATE TABLE orders (id INTEGER)"); err != nil {
		log.Fatal(err)
	}

	key := inbox.Key{Consumer: "orders", MessageID: "3f1c"}
	outOfStock := errors.New("out of stock")
	err = dedup.Process(ctx, key, func(ctx context.Context) error {
		return errors.Join(addOrder(ctx, 7), outOfStock)
	})
	fmt.Println("first delivery:", err, "- orders:", countOrders(ctx))

	for _, delivery := range []string{"second", "third"} {
		err = dedup.Process(ctx, key, func(ctx context.Context) error { return addOrder(ctx, 7) })
		fmt.Printf("%s delivery: %v - orders: %d\n", delivery, err, countOrders(ctx))
	}
	// Output:
	// first delivery: out of stock - orders: 0
	// second delivery: <nil> - orders: 1
	// third delivery: inbox: duplicate - orders: 1
}

// The handler ignores that a statement was interrupted, with which SQLite rolled the transaction back. The guard refuses
// what follows; without it, the second order would stay for good.
func ExampleGuard() {
	ctx := context.Background()
	connector, err := sqlite.NewConnector(":memory:")
	if err != nil {
		log.Fatal(err)
	}
	db := sql.OpenDB(sqlstore.Guard(connector))
	defer db.Close()
	db.SetMaxOpenConns(1) // a database in memory is gone with its connection

	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	if err := store.InitializeSchema(ctx); err != nil {
		log.Fatal(err)
	}
	if _, err := db.ExecContext(ctx, "CREATE TABLE orders (id INTEGER)"); err != nil {
		log.Fatal(err)
	}
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		log.Fatal(err)
	}

	err = dedup.Process(ctx, inbox.Key{Consumer: "orders", MessageID: "3f1c"}, func(ctx context.Context) error {
		tx := store.Executor(ctx)
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, _ = tx.ExecContext(short, "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) INSERT INTO orders SELECT i FROM n")
		_, err := tx.ExecContext(ctx, "INSERT INTO orders VALUES (7)")
		return err
	})
	var orders int
	if err := db.QueryRowContext(ctx, "SELECT count(*) FROM orders").Scan(&orders); err != nil {
		log.Fatal(err)
	}
	fmt.Println("refused:", err != nil, "- orders:", orders)
	// Output: refused: true - orders: 0
}

// Migration tools take the schema as files.
func ExampleMigrations() {
	files, err := fs.Glob(sqlstore.Migrations(sqlstore.PostgreSQL), "*.sql")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(files)
	// Output: [0001_inbox.down.sql 0001_inbox.up.sql]
}
