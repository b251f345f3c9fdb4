// Package wireproxy is a TCP proxy for tests that knows where the messages of the PostgreSQL and of the MySQL protocol
// begin and end. It counts round trips, and injects a fault at a chosen message.
//
// Counting, with a DSN of either kind:
//
//	proxy, dsn := wireproxy.Through(t, os.Getenv("INBOX_TEST_POSTGRES_DSN"))
//	db := open(dsn)
//	warmUp(db)
//	proxy.Reset()
//	deliver(db)
//	if got := proxy.Snapshot(); got.RoundTrips != 4 {
//		t.Errorf("%d round trips:\n%s", got.RoundTrips, got)
//	}
//
// One fault at each message in turn, until a run meets none:
//
//	for n := 1; ; n++ {
//		trap := proxy.Arm(wireproxy.Fault{Kind: wireproxy.CutAfter, N: n})
//		deliver(db)
//		if message, fired := trap.Fired(); !fired {
//			break
//		}
//	}
//
// # Round trips
//
// A round trip is a wait of the client for the server. On PostgreSQL it begins with a message that makes the server answer
// (Query, Sync, Flush, FunctionCall, CopyDone, CopyFail, and those of the startup) while no other is unanswered: any
// number of statements pipelined before one Sync are one round trip, and so are several Syncs sent at once. On MySQL each
// command is one, except those that have no answer (COM_QUIT, COM_STMT_CLOSE, COM_STMT_SEND_LONG_DATA), and so is each
// packet of the login. A round trip is counted before the server sees the message that began it; a client that has its
// answer finds it in [Proxy.Snapshot].
//
// # Encryption
//
// Nothing can be told about encrypted traffic, so the proxy refuses it for the server: SSLRequest and GSSENCRequest are
// answered with N, and CLIENT_SSL (and CLIENT_COMPRESS) are taken out of a MySQL server's greeting.
package wireproxy

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
)

// Protocol is what client and server speak.
type Protocol int

const (
	// PostgreSQL is the frontend/backend protocol, version 3.
	PostgreSQL Protocol = iota + 1

	// MySQL is the client/server protocol of MySQL and MariaDB.
	MySQL
)

// Direction says who sent a message.
type Direction int

const (
	// FromEither is no message's direction; in a [Fault] it selects both.
	FromEither Direction = iota

	// FromClient is from the client to the server.
	FromClient

	// FromServer is from the server to the client.
	FromServer
)

// Message is a message that the proxy saw.
type Message struct {
	// Conn numbers the connections through the proxy, from 1.
	Conn int

	// From is who sent it.
	From Direction

	// Name is the protocol's name for it: Parse, ReadyForQuery, COM_QUERY, OK.
	Name string

	// Text is the statement that it carries or refers to, a command tag, an error's code and text. It never holds
	// parameters or rows.
	Text string
}

// String is for failure messages.
func (m Message) String() string {
	arrow := ">"
	if m.From == FromServer {
		arrow = "<"
	}
	return strings.TrimSpace(fmt.Sprintf("conn %d %s %s %s", m.Conn, arrow, m.Name, m.Text))
}

// Snapshot is what the proxy counted since the last Reset.
type Snapshot struct {
	// RoundTrips is the total over all connections.
	RoundTrips int

	// ByConn has the round trips of each connection that had any, by the connection's number.
	ByConn map[int]int

	// Messages are the messages seen, in the order that the proxy saw them. Empty unless [Proxy.Record] was called.
	Messages []Message
}

// String lists the messages, for failure messages.
func (s Snapshot) String() string {
	lines := make([]string, len(s.Messages))
	for i, message := range s.Messages {
		lines[i] = message.String()
	}
	return strings.Join(lines, "\n")
}

// Proxy passes connections on to a server. It is safe for concurrent use.
type Proxy struct {
	protocol Protocol
	network  string
	target   string
	listener net.Listener
	running  sync.WaitGroup

	mu         sync.Mutex
	closed     bool
	links      map[*link]struct{}
	lastConn   int
	roundTrips int
	byConn     map[int]int
	recording  bool
	messages   []Message
	trap       *Trap
}

// Listen starts a proxy on a free port of the loopback interface. The target is host:port, or the path of a Unix socket.
func Listen(protocol Protocol, target string) (*Proxy, error) {
	if protocol != PostgreSQL && protocol != MySQL {
		return nil, fmt.Errorf("wireproxy: unknown protocol %d", protocol)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // returns at once
	if err != nil {
		return nil, fmt.Errorf("wireproxy: listen: %w", err)
	}
	p := &Proxy{
		protocol: protocol,
		network:  "tcp",
		target:   target,
		listener: listener,
		links:    make(map[*link]struct{}),
		byConn:   make(map[int]int),
	}
	if strings.HasPrefix(target, "/") {
		p.network = "unix"
	}
	p.running.Go(p.accept)
	return p, nil
}

// Through starts a proxy in front of the server that dsn names, and returns dsn with the proxy's address in its place. The
// proxy is closed when the test ends. DSNs are a PostgreSQL URL or one of go-sql-driver/mysql. Messages are recorded.
func Through(tb testing.TB, dsn string) (*Proxy, string) {
	tb.Helper()
	protocol, target, rewrite, err := parseDSN(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	p, err := Listen(protocol, target)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.Close)
	p.Record()
	return p, rewrite(p.Addr())
}

var mysqlAddress = regexp.MustCompile(`@(tcp|unix)\(([^)]*)\)`)

// parseDSN returns the server's address, and what puts another one in its place.
func parseDSN(dsn string) (protocol Protocol, target string, rewrite func(addr string) string, err error) {
	if m := mysqlAddress.FindStringSubmatchIndex(dsn); m != nil {
		return MySQL, dsn[m[4]:m[5]], func(addr string) string {
			return dsn[:m[0]] + "@tcp(" + addr + ")" + dsn[m[1]:]
		}, nil
	}
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return 0, "", nil, errors.New("wireproxy: the DSN is neither a postgres URL nor user@tcp(host:port)/database")
	}
	query := u.Query()
	host, port := u.Hostname(), u.Port()
	if query.Has("host") {
		host = query.Get("host")
	}
	if query.Has("port") {
		port = query.Get("port")
	}
	if port == "" {
		port = "5432"
	}
	target = net.JoinHostPort(host, port)
	if strings.HasPrefix(host, "/") {
		target = host + "/.s.PGSQL." + port
	}
	return PostgreSQL, target, func(addr string) string {
		query.Del("host")
		query.Del("port")
		rewritten := *u
		rewritten.Host, rewritten.RawQuery = addr, query.Encode()
		return rewritten.String()
	}, nil
}

// Addr is the host:port to connect to.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Close closes every connection, and returns when nothing of the proxy runs any more.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	links := make([]*link, 0, len(p.links))
	for l := range p.links {
		links = append(links, l)
	}
	p.mu.Unlock()

	_ = p.listener.Close()
	for _, l := range links {
		l.close()
	}
	p.running.Wait()
}

// Record makes the proxy keep every message for [Proxy.Snapshot].
func (p *Proxy) Record() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recording = true
}

// Reset forgets what was counted and recorded.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.roundTrips, p.messages = 0, nil
	clear(p.byConn)
}

// Snapshot returns what was counted and recorded since the last Reset.
func (p *Proxy) Snapshot() Snapshot {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Snapshot{
		RoundTrips: p.roundTrips,
		ByConn:     make(map[int]int, len(p.byConn)),
		Messages:   append([]Message(nil), p.messages...),
	}
	for conn, n := range p.byConn {
		s.ByConn[conn] = n
	}
	return s
}

// Conns returns how many connections are open.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	server, err := net.Dial(p.network, p.target) //nolint:noctx // the test's own server
	if err != nil {
		_ = client.Close()
		return
	}
	l := newLink(p, client, server)
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		l.close()
		return
	}
	p.lastConn++
	l.id = p.lastConn
	p.links[l] = struct{}{}
	p.mu.Unlock()

	l.run()

	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// see counts and records a message. It returns the trap if the message springs it.
func (p *Proxy) see(message Message, roundTrip, faultable bool) *Trap {
	p.mu.Lock()
	defer p.mu.Unlock()
	if roundTrip {
		p.roundTrips++
		p.byConn[message.Conn]++
	}
	if p.recording {
		p.messages = append(p.messages, message)
	}
	if trap := p.trap; faultable && trap != nil && trap.springs(message) {
		p.trap = nil
		return trap
	}
	return nil
}
